"""The types and rules that both sides of the wire must agree on; nothing else.

Nouns, wire messages, life-cycle tables and report folding are pure. The bus, settings, logging,
clock and sd_notify are edges that agent and coordinator share. No helpers without an owner.
"""
