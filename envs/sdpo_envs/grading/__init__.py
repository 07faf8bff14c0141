"""Graders as plain functions: text in, verdict out. The environments give them tasks, rewards and feedback."""
