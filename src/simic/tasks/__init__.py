"""What hosts learn: data sets, host networks, the tasks that pair them, and families that tasks are drawn from."""
