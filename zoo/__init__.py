"""Architectures of other libraries, taken through all that finecast does with a model.

    make zoo                      # every architecture, in an environment of its own
    python -m zoo bert resnet18   # some

``networks`` is the table of architectures, ``stages`` what is done with one, ``one`` the
process that does it, ``running`` starts and limits that process, ``report`` writes
``docs/zoo.md``.
"""
