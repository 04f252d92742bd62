"""Measuring the collectives.

statistics.py   numbers from samples; pure
placement.py    one core for each rank
data.py         inputs whose results are known exactly, in every dtype
layouts.py      what is measured: a row per collective, and what it must leave behind
collectives.py  our collectives, called as a row says
ranks.py        the measurement, as every rank runs it
rows.py         its table, row by row
__main__.py     a rank that ``farandole bench -np`` started
comparing.py    the measurement beside other libraries, in turns
peers/          those libraries, each in processes of its own
plotting.py     the picture of either
"""
