"""What runs in the fork server and in the program's own process. Standard library only, Python 3.9: these modules
are also sent to Sandbox Fusion servers. Nothing in here is trusted once a program runs beside it."""
