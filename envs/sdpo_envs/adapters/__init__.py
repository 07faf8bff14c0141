"""Environments of other projects, behind the `sdpo.Env` interface. Each is imported only when it is used."""
