"""Which process on which machine. Its commands join `tenuto` through the entry-point group `tenuto.commands`."""
