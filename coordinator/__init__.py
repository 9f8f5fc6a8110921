"""The deciding side, in floors; a module imports only from lower floors.

cli                        what people see
demo | web | plan          a whole cell on one machine; the page for browsers; plans, played ahead
service | sim | client     drivers: clocks, sockets, processes, files; `plain_text` words their rows
workloads | plugins        traces, load series and the generator, typed; installed policies
engine                     pure: handle(event, now_s) -> outcome; owns all mutable cluster state
policies                   pure: snapshot -> decisions, each with a reason
"""
