"""How processes talk: identities, messages, frames, sockets, clocks and the client SDK.

Nothing in here knows what a batch or a placement is for.
"""
