"""Layouts of all operations and parameters by an integer program over op strategies, solved by HiGHS."""
