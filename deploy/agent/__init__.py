"""Keeps processes of a node alive: stages, their template, the second tier's master; reads their logs and health."""
