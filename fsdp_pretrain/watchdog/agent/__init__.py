"""A node's watchdog process, and the tasks of the leading one."""
