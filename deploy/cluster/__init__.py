"""Stages and proxies that are started by themselves, on several hosts: membership, the head, the bus."""
