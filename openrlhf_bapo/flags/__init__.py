"""Flags of the commands, and what is checked of them and of the files that they name before anything starts.

In reading order:

    mistakes.py     how a user's mistake ends a command
    loss_flags.py   the flags of the loss and its clip rule, also Molt's
    values.py       the allowed values of every flag alone
    train_flags.py  our other flags of `train`
    input_files.py  checks of the files that a command names
    labels.py       checks of their labels
    clashes.py      rules over several flags
    checks.py       every check of a training command, in order
    arguments.py    parses and checks a training command, inside OpenRLHF's main block
"""
