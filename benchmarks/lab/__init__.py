"""A laboratory for searches: hundreds of simulated subjects, judged by what is true of them.

``nets`` says what is true of a net, ``simulation`` what a search may ask of it and what that
costs, ``subject`` joins that with today's ``tune``. ``benchmarks/RESULTS-lab.md`` has figures.
"""
