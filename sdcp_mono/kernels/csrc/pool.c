/* A persistent pool of POSIX threads: one pass of a model is one sdcp_parallel call with barriers between phases. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "sdcp_kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

/* Waiting spins this long before it sleeps: a phase of a small model takes 10 to 100 us and waking a sleeper costs
 * about 50 us, so a wait inside a pass seldom sleeps. It yields on the way: where a neighbour has taken a core, the
 * thread that is waited for may need this one (measured: a pass among busy neighbours 21 ms instead of 58). */
#define SPIN_NANOSECONDS 100000
#define MAX_THREADS 256 /* more than any machine's useful share of one memory bus */

/* A counter to wait on. */
typedef struct {
    _Alignas(64) atomic_uint value;
    atomic_uint sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} event;

#define EVENT_INIT {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER}

static struct {
    pthread_mutex_t turn; /* held by the one caller of sdcp_parallel, or by start and stop */
    pthread_t workers[MAX_THREADS];
    int threads; /* caller included */
    bool stopping;
    sdcp_task task;
    void *arg;
    event start, done, passed;    /* a task begins; all workers finished it; a barrier opened */
    _Alignas(64) atomic_uint running; /* workers still inside the task */
    _Alignas(64) atomic_uint arrived; /* threads waiting at the barrier */
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER, .threads = 1,
          .start = EVENT_INIT, .done = EVENT_INIT, .passed = EVENT_INIT};

static _Thread_local bool inside; /* this thread runs a task */

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Wait until the event's value differs from `old`. */
static void event_wait(event *e, unsigned old) {
    int64_t deadline = 0;
    for (unsigned spin = 1; atomic_load_explicit(&e->value, memory_order_acquire) == old; spin++) {
        pause_briefly();
        if (spin % 64) continue;
        sched_yield();
        int64_t now = nanoseconds();
        if (!deadline) deadline = now + SPIN_NANOSECONDS;
        if (now < deadline) continue;
        pthread_mutex_lock(&e->mutex);
        atomic_fetch_add(&e->sleepers, 1); /* in one order with event_signal: one of the two sees the other */
        while (atomic_load(&e->value) == old) pthread_cond_wait(&e->changed, &e->mutex);
        atomic_fetch_sub(&e->sleepers, 1);
        pthread_mutex_unlock(&e->mutex);
        return;
    }
}

static void event_signal(event *e) {
    atomic_fetch_add(&e->value, 1);
    if (!atomic_load(&e->sleepers)) return;
    pthread_mutex_lock(&e->mutex);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
}

void sdcp_barrier(int threads) {
    if (threads == 1) return;
    unsigned old = atomic_load_explicit(&pool.passed.value, memory_order_relaxed);
    if (atomic_fetch_add(&pool.arrived, 1) + 1 < (unsigned)threads) {
        event_wait(&pool.passed, old);
    } else {
        atomic_store(&pool.arrived, 0);
        event_signal(&pool.passed);
    }
}

typedef struct {
    int thread;
    unsigned seen;
} worker_start;

static worker_start starts[MAX_THREADS];

static void *worker(void *arg) {
    int thread = ((worker_start *)arg)->thread;
    unsigned seen = ((worker_start *)arg)->seen;
    inside = true;
    for (;;) {
        event_wait(&pool.start, seen++);
        if (pool.stopping) return NULL;
        pool.task(pool.arg, thread, pool.threads);
        if (atomic_fetch_sub(&pool.running, 1) == 1) event_signal(&pool.done);
    }
}

static void stop_workers(void) {
    if (pool.threads == 1) return;
    pool.stopping = true;
    event_signal(&pool.start);
    for (int i = 1; i < pool.threads; i++) pthread_join(pool.workers[i], NULL);
    pool.stopping = false;
    pool.threads = 1;
}

/* A forked child has none of the threads; it runs alone until it starts its own. */
static void after_fork(void) {
    event *events[] = {&pool.start, &pool.done, &pool.passed};
    for (int i = 0; i < 3; i++) {
        pthread_mutex_init(&events[i]->mutex, NULL);
        pthread_cond_init(&events[i]->changed, NULL);
        atomic_store(&events[i]->sleepers, 0);
    }
    pthread_mutex_init(&pool.turn, NULL);
    atomic_store(&pool.arrived, 0);
    pool.threads = 1;
    inside = false;
}

static pthread_once_t at_fork = PTHREAD_ONCE_INIT;

static void register_at_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

int sdcp_pool_start(int threads) {
    if (inside) return pool.threads;
    pthread_once(&at_fork, register_at_fork);
    pthread_mutex_lock(&pool.turn);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads != pool.threads) {
        stop_workers();
        unsigned seen = atomic_load(&pool.start.value);
        for (int i = 1; i < threads; i++) {
            starts[i] = (worker_start){i, seen};
            if (pthread_create(&pool.workers[i], NULL, worker, &starts[i])) break;
            pool.threads++;
        }
    }
    threads = pool.threads;
    pthread_mutex_unlock(&pool.turn);
    return threads;
}

void sdcp_pool_stop(void) { sdcp_pool_start(1); }

int sdcp_pool_threads(void) { return pool.threads; }

void sdcp_parallel(sdcp_task task, void *arg) {
    if (inside) {
        task(arg, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool.turn);
    inside = true;
    int threads = pool.threads;
    if (threads > 1) {
        pool.task = task;
        pool.arg = arg;
        unsigned old = atomic_load(&pool.done.value);
        atomic_store(&pool.running, (unsigned)threads - 1);
        event_signal(&pool.start);
        task(arg, 0, threads);
        event_wait(&pool.done, old);
    } else {
        task(arg, 0, 1);
    }
    inside = false;
    pthread_mutex_unlock(&pool.turn);
}
