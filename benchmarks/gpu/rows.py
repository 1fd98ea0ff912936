def run(report): pass
