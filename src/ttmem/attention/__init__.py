"""The attention that all of ttmem shares: branches, their merge by log-sum-exp, ragged memories."""
