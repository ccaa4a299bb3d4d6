/* The state loop in C: the floor that the Python sampler is compared with.
 *
 * The same calls at the same times: reasons and SM clock of every GPU each millisecond; core and
 * memory temperature, power, memory clock and utilization of one GPU a tick in turn of at least
 * eight. Prints CPU share and lateness. Usage: state_loop SECONDS */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

typedef void *device;
struct field { unsigned id, scope; long long stamp, latency; unsigned type; int ret; double value; };

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 10;
    void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!lib) { fprintf(stderr, "%s\n", dlerror()); return 1; }
#define CALL(name, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(lib, "nvmlDeviceGet" #name)
    int (*init)(void) = (int (*)(void))dlsym(lib, "nvmlInit_v2");
    CALL(Count_v2, unsigned *); CALL(HandleByIndex_v2, unsigned, device *);
    CALL(CurrentClocksEventReasons, device, unsigned long long *);
    CALL(ClockInfo, device, int, unsigned *); CALL(Temperature, device, int, unsigned *);
    CALL(UtilizationRates, device, unsigned *); CALL(FieldValues, device, int, struct field *);
    if (init()) return 1;
    unsigned gpus = 0;
    device handles[64];
    Count_v2(&gpus);
    for (unsigned i = 0; i < gpus; i++) HandleByIndex_v2(i, &handles[i]);
    prctl(PR_SET_TIMERSLACK, 1);
    long ticks = seconds * 1000, turns = gpus > 8 ? gpus : 8;
    double *late = calloc(ticks, sizeof *late);
    char *sink = malloc(1 << 20);
    long long start = now() + 1000000;
    for (long i = 0; i < ticks; i++) {
        long long due = start + i * 1000000LL;
        struct timespec t = {due / 1000000000LL, due % 1000000000LL};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
        late[i] = (now() - due) / 1e3;
        unsigned long long reasons;
        unsigned value, pair[2];
        for (unsigned g = 0; g < gpus; g++) {
            CurrentClocksEventReasons(handles[g], &reasons);
            ClockInfo(handles[g], 1, &value);
            memcpy(sink + (i % 1000) * 512 + g * 16, &reasons, 8);
            memcpy(sink + (i % 1000) * 512 + g * 16 + 8, &value, 4);
        }
        if (i % turns < gpus) {
            device g = handles[i % turns];
            struct field fields[2] = {{82, 0, 0, 0, 0, 0, 0}, {186, 0, 0, 0, 0, 0, 0}};
            Temperature(g, 0, &value);
            FieldValues(g, 1, &fields[0]);
            FieldValues(g, 1, &fields[1]);
            ClockInfo(g, 2, &value);
            UtilizationRates(g, pair);
            memcpy(sink, fields, sizeof fields);
        }
    }
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    double cpu = use.ru_utime.tv_sec + use.ru_stime.tv_sec +
                 (use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
    qsort(late, ticks, sizeof *late, by_size);
    printf("C loop: gpus %u cpu %.2f%% (init included) lateness us p50 %.1f p99 %.1f p99.9 %.1f max %.1f\n",
           gpus, 100 * cpu / seconds, late[ticks / 2], late[(long)(ticks * .99)],
           late[(long)(ticks * .999)], late[ticks - 1]);
    return 0;
}
