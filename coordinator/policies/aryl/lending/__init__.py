"""Lending: how many nodes a service can spare, and which of them.

Start at `balance`. `forecast` predicts load, `loan_lifetime` predicts how long a loan lasts.
"""
