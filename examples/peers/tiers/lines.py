"""The line protocol of README.md for stores in Python: an engine gives clear, put, written and get."""
import json
import random
import sys
import time


def percentile(times, share):
    times = sorted(times)
    return times[min(len(times) * share // 100, len(times) - 1)]


def serve(name, engine):
    """Speaks on the standard output that the program began with; libraries may write to it otherwise."""
    print('READY', name, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == 'Q':
            break
        try:
            operation = put if words[0] == 'PUT' else get
            answer = operation(engine, int(words[1]), int(words[2]))
        except Exception as error:  # told to the one who asked
            answer = {'err': f'{type(error).__name__}: {error}'}
        print(json.dumps(answer), flush=True)


def put(engine, size, count):
    engine.clear(size, count)
    times = []
    begun = time.perf_counter()
    for number in range(count):
        engine.stamp(number)
        one = time.perf_counter()
        engine.put(number)
        times.append((time.perf_counter() - one) * 1e6)
    put_s = time.perf_counter() - begun
    engine.written()
    all_s = time.perf_counter() - begun
    return {'gbps': size * count / all_s / 1e9, 'gbps_before_flush': size * count / put_s / 1e9, 'count': count,
            'p50_us': percentile(times, 50), 'p99_us': percentile(times, 99), 'bad': 0, 'miss': 0}


def get(engine, size, count):
    numbers = list(range(count))
    random.Random(1).shuffle(numbers)
    times, bad, miss = [], 0, 0
    begun = time.perf_counter()
    for number in numbers:
        one = time.perf_counter()
        is_there = engine.get(number)
        times.append((time.perf_counter() - one) * 1e6)
        miss += not is_there
        bad += bool(is_there) and not engine.is_block(number)
    seconds = time.perf_counter() - begun
    return {'gbps': size * (count - miss) / seconds / 1e9, 'count': count, 'p50_us': percentile(times, 50),
            'p99_us': percentile(times, 99), 'bad': bad, 'miss': miss}
