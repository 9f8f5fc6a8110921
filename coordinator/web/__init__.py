"""The dashboard: a read-only page of the cell, live in a browser. It is a client of the API.

server     addresses, routes, and the stream of updates to each browser
address    where it listens
guard      who may look: host names, token, session, headers
feed       one poll of the coordinator for all browsers
looks      the requests of one poll
board      what a page shows now, and what changed since a browser's last update
pages      fragments of HTML from the rows of the API
timeline   bars and time lines as numbers
"""
