"""Runs in a browser, from the files of their directories: a live page, and a report in one file."""
