"""``hgc profile``: measures the machine it runs on and writes it as a cluster file; see docs/design/profile.md."""
