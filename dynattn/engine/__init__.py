"One call of attention: checked, described and computed."
