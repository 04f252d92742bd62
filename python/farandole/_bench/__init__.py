"""Measuring the collectives.

statistics.py   numbers from samples; pure
placement.py    one core for each rank
data.py         inputs whose results are known exactly, in every dtype
collectives.py  what is measured: a row per collective
ranks.py        the measurement, as every rank runs it
__main__.py     a rank that ``farandole bench -np`` started
comparing.py    the measurement beside other libraries, in turns
peers/          those libraries, each in processes of its own
plotting.py     the picture of either
"""
