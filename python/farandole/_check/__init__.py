"""Looks at hosts and at the links between them before a job runs there, by one rank on each host.

measure.py    the ranks: facts of each host, and a link at a time
judge.py      what of that is out of line
__main__.py   a rank of `farandole check`
"""
