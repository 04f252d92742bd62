"""The tuning table of this kind of host: measured, kept, and handed to every world.

kept.py       the file it is kept in; little of the standard library, as the launcher looks there
first_use.py  `farandole run` measures a host that it knows nothing of
table.py      what rank 0 hands out when ranks meet
ranks.py      the measurement, as every rank runs it
fit.py        the model's numbers from the measured times; pure
links.py      what is between hosts
over_mpi.py   what MPI takes, as ranks of mpiexec measure it
starting.py   starts the ranks that measure, or that only meet
__main__.py   such a rank
"""
