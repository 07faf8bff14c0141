"""Environments that come with sdpo; each registers through an entry point, as a third party's would."""
