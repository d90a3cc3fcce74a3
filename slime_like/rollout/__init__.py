"""From the data set to scored groups of samples: data source, generation, rewards, filters, evaluation."""
