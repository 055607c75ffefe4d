"""What `tenuto deploy` does on a host: sent there through ssh, run by that host's own Python, with its standard library alone.

One request comes on stdin as a line of JSON, with the content of files behind it; answers are lines of JSON on stdout that begin with
`tenuto:`, the last one with `ok` or `error`. Nothing of a request is on a command line. Every request can be repeated: what is
there already stays, what was begun and not ended is begun anew. Two at once on one host wait for each other.

    DIRECTORY/HOST/   wheels/  versions/VERSION/  configs/HASH/  keys/  roles/ROLE.sh  logs/  log_limit.sh  run/  state.json  supervisor/
"""
