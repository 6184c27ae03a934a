"""The device suite, on a machine that has a GPU: the tests, the table of costs, and the kills. See `__main__`."""
