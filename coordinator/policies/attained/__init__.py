"""Orders by the service that jobs have attained. Must not know who decides."""
