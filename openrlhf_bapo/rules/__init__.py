"""What bounds or weighs the tokens of an update. Knows torch and the standard library, and no framework.

In reading order:

    clip_config.py        settings of BAPO's rules, and presets
    clip_bounds.py        the tally of an update's tokens, and the search over it (the paper's section 4.2)
    clip_rules.py         BAPO's rules: bounds per update
    second_moment.py      the search of M2PO
    staleness_weights.py  tapered weights
    other_rules.py        other methods' rules, and their names
    own_rules.py          a user's rule, from a file
    settings.py           a rule from parsed flags
    rule_loss.py          a rule in training: its updates and their metrics
    update_windows.py     the micro-batches of an update
    entropy_rule.py       the change of entropy that an update predicts
    bounds_metrics.py     the metrics of its bounds
    saved_rule.py         a rule's state in checkpoints
"""
