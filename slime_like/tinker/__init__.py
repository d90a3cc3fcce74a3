"""A server for clients that train over HTTP: many tenants' adapters on one trainer and one fleet of engines.

    api/         HTTP and the wire's formats -> Call; answers of calls -> the wire
    service      calls in: durable, in order, executed; answers out
    store/       what must outlive the process: a database
    backends/    the trainer's verbs and the engines, as protocols.py wants them

Facts of the wire: the public SDK `tinker`. Read records.py and protocols.py first.
"""
