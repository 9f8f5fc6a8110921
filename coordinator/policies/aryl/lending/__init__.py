"""How many nodes a service can spare, and which of them.

Start at `balance`; `forecast` predicts load, `loan_lifetime` how long a loan lasts.
"""
