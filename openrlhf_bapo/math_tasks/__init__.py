"""Mathematical tasks: data sets, answers, evaluation metrics; knows no framework."""
