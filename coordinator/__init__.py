"""The deciding side, in floors; a module imports only from lower floors.

cli                        what people see
demo                       a whole cell on one machine: pretend services and jobs, real processes
service | sim | client     drivers: clocks, sockets, processes, files
workloads                  traces, load series and the generator, as typed values
engine                     pure: handle(event, now_s) -> commands; owns all mutable cluster state
policies                   pure: snapshot -> decisions, each with a reason
"""
