"""What the numbers of the steps say: rules, incidents, automatic rollbacks. No torch."""
