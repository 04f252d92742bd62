"""What Horovod's programs import from ``horovod.common``: exceptions, questions about the build."""
