"""Measuring the tuning table of a host (``farandole tune``).

ranks.py     the measurement, as every rank runs it
fit.py       the model's numbers from the measured times; pure
__main__.py  a rank that ``farandole tune`` started
"""
