"""What tenants are promised and may take, under whatever policy. Must not know any policy."""
