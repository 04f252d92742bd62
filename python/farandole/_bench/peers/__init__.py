"""Other libraries beside ours: each in processes of its own, asked in turn.

table.py    what is compared: a row per peer, how its ranks are started, how to get it
finding.py  where a peer lives: which Python has it, which files of that Python are its own
hosts.py    the same on hosts that are network namespaces
workers.py  the ranks of one peer, started once and asked over sockets
worker.py   one rank of a peer: meets the others, times calls, verifies results
libraries/  how each library is joined and called, a file per library
"""
