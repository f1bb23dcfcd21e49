"""The ``hgc`` command and what it runs."""
