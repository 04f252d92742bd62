"""The collectives on arrays that ``import farandole`` shows.

whole.py    those that fold, broadcast, barrier
rows.py     those that move rows between ranks and fold nothing
grouped.py  many arrays in one call
pair.py     between two ranks
table.py    the table that they follow from
arrays.py   what all of them take

Examples are of one rank, behind ``import farandole as fd, numpy as np`` and ``fd.init()``.
"""

from farandole._collectives.grouped import *  # noqa: F403
from farandole._collectives.pair import *  # noqa: F403
from farandole._collectives.rows import *  # noqa: F403
from farandole._collectives.whole import *  # noqa: F403
