"""What the stages of a planner's tick do with the answers of several plugins: values in, values out."""
