"""Parts of policies that offer nodes and let others choose: refusals, hoards, and standstills."""
