"""A site's commands that start, stop, route and unroute an inference server.

Start at `runner`; `running_command` finds a command that outlived its agent. `route` is
`aryl-route`, hooks for haproxy and nginx.
"""
