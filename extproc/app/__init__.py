"""The composition root: the only place where objects are wired. Each command calls one function."""
