"""Requests of applications: graphs of models under one deadline."""
