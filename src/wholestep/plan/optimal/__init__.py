"""The choice of a layout for every operation at once: an integer program over the ways of ops, solved by HiGHS."""
