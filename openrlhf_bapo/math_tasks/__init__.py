"""Mathematical tasks: datasets, answers, the grader, evaluation metrics. Independent of any framework."""
