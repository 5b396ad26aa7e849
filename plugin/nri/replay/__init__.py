"""Demand, recorded or generated, through policy and admission, without a container: for tuning, tests and fleet-size questions.

``traces`` is what an environment wants over its life and how that is written to files; ``generate`` makes such demand from
published quantiles; ``strategies`` are the ways to set quotas that are compared; ``simulate`` is the node; ``report`` says
what came of it.
"""
