/* A scripted CUPTI, and the few calls of libcuda that go with it, in one library.
 *
 * The script, named by FAKE_CUPTI_SCRIPT, is read again at every call that is not made per sample:
 * a line is a key and its values, see __init__.py. A struct whose size is not the header's is
 * refused. A GPU's counters are one program's: who enables it holds a lock on the file gpuN.lock
 * beside the script.
 */

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SIZED(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))
#define CHECK(p, last)                                                      \
    do {                                                                    \
        if ((p)->structSize != SIZED(__typeof__(*(p)), last)) return 1;     \
    } while (0)
#define HEAD size_t structSize; void *pPriv

enum { BUSY = 26, NOT_SUPPORTED = 27, UNKNOWN = 999, BAD_NAME = 17, NO_ROOM = 8, WRONG = 7 };
enum { LINES = 256, METRICS = 32, TEXT = 200 };

typedef struct { char key[64]; char word[TEXT]; double number; double more; int has_more; } Line;
typedef struct { int count; const char *names[METRICS]; } Host;
typedef struct {
    int gpu, lock, started, fresh, latest;
    uint64_t interval, cycles, next;
    size_t buffer;
} Session;
typedef struct { uint64_t magic, most, count; struct { uint64_t start, end; } samples[]; } Image;

static Line lines[LINES];
static int line_count;

static void load(void) {
    FILE *file = fopen(getenv("FAKE_CUPTI_SCRIPT"), "r");
    char text[512];
    line_count = 0;
    if (!file) abort();
    while (fgets(text, sizeof text, file) && line_count < LINES) {
        Line *line = &lines[line_count];
        memset(line, 0, sizeof *line);
        int n = sscanf(text, "%63s %199s %lf %lf", line->key, line->word, &line->number,
                       &line->more);
        line->has_more = n == 4;
        if (n >= 2) line_count++;
    }
    fclose(file);
}

static const Line *find(const char *key, const char *word) {
    for (int i = line_count - 1; i >= 0; i--)
        if (!strcmp(lines[i].key, key) && (!word || !strcmp(lines[i].word, word))) return &lines[i];
    return NULL;
}

/* What a call is to answer, for this GPU or all (-1: it is about none). */
static int told(const char *name, int gpu) {
    load();
    if (find("crash", name)) *(volatile int *)0 = 0;
    const Line *hang = find("hang", name);
    while (hang && (int)hang->number == gpu) pause();
    for (int i = line_count - 1; i >= 0; i--) {
        const Line *line = &lines[i];
        if (!strcmp(line->key, "result") && !strcmp(line->word, name) &&
            (!line->has_more || (int)line->more == gpu))
            return (int)line->number;
    }
    return 0;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* How far stamps are from the wall clock, which was moved after sampling had begun, say. */
static uint64_t moved_ns(uint64_t end) {
    const Line *moved = find("moved", NULL);
    if (!moved || (double)end / 1e9 <= moved->number) return 0;
    return (uint64_t)(int64_t)(atof(moved->word) * 1e9);
}

static const char *gpu_at(int number) {
    for (int i = 0; i < line_count; i++)
        if (!strcmp(lines[i].key, "gpu") && number-- == 0) return lines[i].word;
    return NULL;
}

__attribute__((constructor)) static void loaded(void) {
#ifdef CUPTI
    told("load", -1);
#endif
}

/* libcuda */

EXPORT int cuInit(unsigned flags) { (void)flags; return told("cuInit", -1); }

EXPORT int cuDriverGetVersion(int *version) {
    int result = told("cuDriverGetVersion", -1);
    const Line *line = find("driver", NULL);
    *version = line ? atoi(line->word) : 13000;
    return result;
}

EXPORT int cuDeviceGetCount(int *count) {
    load();
    for (*count = 0; gpu_at(*count);) ++*count;
    return 0;
}

EXPORT int cuDeviceGetPCIBusId(char *text, int size, int device) {
    load();
    snprintf(text, (size_t)size, "%s", gpu_at(device));
    return 0;
}

EXPORT int cuDeviceGetByPCIBusId(int *device, const char *bus_id) {
    load();
    for (*device = 0; gpu_at(*device); ++*device)
        if (!strcmp(gpu_at(*device), bus_id)) return told("cuDeviceGetByPCIBusId", *device);
    return 101;
}

/* CUPTI: what a device is */

typedef struct { HEAD; } Initialize;
typedef struct { HEAD; size_t device; const char *chip; } GetChipName;
typedef struct { HEAD; size_t device; size_t size; uint8_t *image; } Availability;

EXPORT int cuptiGetVersion(uint32_t *version) {
    int result = told("cuptiGetVersion", -1);
    const Line *line = find("api", NULL);
    *version = result ? 0 : line ? (uint32_t)atoi(line->word) : 130001;
    return result;
}

EXPORT int cuptiProfilerInitialize(Initialize *p) {
    CHECK(p, pPriv);
    return told("cuptiProfilerInitialize", -1);
}

EXPORT int cuptiDeviceGetChipName(GetChipName *p) {
    static char chip[TEXT];
    CHECK(p, chip);
    int result = told("cuptiDeviceGetChipName", (int)p->device);
    const Line *line = find("chip", NULL);
    strcpy(chip, line ? line->word : "GH100");
    p->chip = chip;
    return result;
}

static int lock_of(int gpu) {
    char path[1024];
    snprintf(path, sizeof path, "%s.gpu%d.lock", getenv("FAKE_CUPTI_SCRIPT"), gpu);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (flock(lock, LOCK_EX | LOCK_NB)) {
        close(lock);
        return -1;
    }
    return lock;
}

EXPORT int cuptiPmSamplingGetCounterAvailability(Availability *p) {
    CHECK(p, image);
    int result = told("cuptiPmSamplingGetCounterAvailability", (int)p->device);
    if (!p->image) p->size = 128;
    else memset(p->image, 7, p->size);
    return result;
}

/* CUPTI: metrics */

typedef struct { HEAD; int type; const char *chip; const uint8_t *image; Host *host; } HostInit;
typedef struct { HEAD; Host *host; } OneHost;
typedef struct { HEAD; Host *host; const char **names; size_t count; } AddMetrics;
typedef struct { HEAD; Host *host; size_t size; } ConfigSize;
typedef struct { HEAD; Host *host; size_t size; uint8_t *image; } GetConfig;
typedef struct { HEAD; size_t size; uint8_t *image; size_t passes; } Passes;
typedef struct {
    HEAD; Host *host; const uint8_t *image; size_t size, index; const char **names; size_t count;
    double *values;
} Evaluate;

EXPORT int cuptiProfilerHostInitialize(HostInit *p) {
    CHECK(p, host);
    int result = told("cuptiProfilerHostInitialize", -1);
    if (result || p->type != 1 || !p->chip || !p->image) return result ? result : 1;
    p->host = calloc(1, sizeof *p->host);
    return 0;
}

EXPORT int cuptiProfilerHostDeinitialize(OneHost *p) {
    CHECK(p, host);
    free(p->host);
    return 0;
}

EXPORT int cuptiProfilerHostConfigAddMetrics(AddMetrics *p) {
    CHECK(p, count);
    load();
    for (size_t i = 0; i < p->count; i++) {
        if (find("absent", p->names[i])) return UNKNOWN;
        if (!find("rate", p->names[i]) && !find("level", p->names[i])) return BAD_NAME;
        p->host->names[p->host->count++] = p->names[i];
    }
    return 0;
}

EXPORT int cuptiProfilerHostGetConfigImageSize(ConfigSize *p) {
    CHECK(p, size);
    p->size = 64;
    return 0;
}

EXPORT int cuptiProfilerHostGetConfigImage(GetConfig *p) {
    CHECK(p, image);
    load();
    p->image[0] = 1;
    for (int i = 0; i < p->host->count; i++) {
        const Line *line = find("passes", p->host->names[i]);
        if (line && line->number > p->image[0]) p->image[0] = (uint8_t)line->number;
    }
    return 0;
}

EXPORT int cuptiProfilerHostGetNumOfPasses(Passes *p) {
    CHECK(p, passes);
    p->passes = p->image[0];
    return 0;
}

/* A rate is per second, so a sample has its share; a level is what it is. */
EXPORT int cuptiProfilerHostEvaluateToGpuValues(Evaluate *p) {
    CHECK(p, values);
    const Image *image = (const Image *)p->image;
    if (image->magic != 42 || p->index >= image->count) return 1;
    double seconds = (double)(image->samples[p->index].end - image->samples[p->index].start) / 1e9;
    for (size_t i = 0; i < p->count; i++) {
        const Line *rate = find("rate", p->names[i]), *level = find("level", p->names[i]);
        p->values[i] = rate ? rate->number * seconds : level ? level->number : 0;
    }
    return 0;
}

/* CUPTI: sampling */

#define LONG_NS 5000000000u

typedef struct { HEAD; size_t device; Session *session; } Enable;
typedef struct { HEAD; Session *session; } OneSession;
typedef struct {
    HEAD; Session *session; size_t config_size; const uint8_t *config; size_t buffer;
    uint64_t interval; int trigger, append;
} SetConfig;
typedef struct {
    HEAD; Session *session; const char **names; size_t count; uint32_t most; size_t size;
} DataSize;
typedef struct { HEAD; Session *session; size_t size; Image *image; } Clear;
typedef struct {
    HEAD; Session *session; Image *image; size_t size; int reason; uint8_t overflow;
} Decode;
typedef struct { HEAD; const Image *image; size_t size, total, populated, completed; } Count;
typedef struct {
    HEAD; Session *session; const Image *image; size_t size, index; uint64_t start, end;
} Stamp;

EXPORT int cuptiPmSamplingEnable(Enable *p) {
    CHECK(p, session);
    int result = told("cuptiPmSamplingEnable", (int)p->device);
    if (result) return result;
    int lock = lock_of((int)p->device);
    if (lock < 0) return BUSY;
    p->session = calloc(1, sizeof *p->session);
    p->session->gpu = (int)p->device;
    p->session->lock = lock;
    return 0;
}

EXPORT int cuptiPmSamplingSetConfig(SetConfig *p) {
    load();
    const Line *api = find("api", NULL), *chip = find("chip", NULL);
    int turing = chip && !strncmp(chip->word, "TU", 2);
    int latest = 0;
    if (api && atoi(api->word) < 26) {
        if (p->structSize != SIZED(SetConfig, trigger)) return 1;
    } else {
        CHECK(p, append);
        latest = p->append;
    }
    if (p->config[0] != 1 || (turing && latest)) return NOT_SUPPORTED;
    if (p->trigger && (turing || (chip && !strcmp(chip->word, "GA100")))) return NOT_SUPPORTED;
    if (p->trigger > 1 || p->session->started) return WRONG;
    p->session->cycles = p->trigger ? 0 : p->interval;
    p->session->interval = p->interval;
    p->session->buffer = p->buffer;
    p->session->latest = latest;
    return told("cuptiPmSamplingSetConfig", p->session->gpu);
}

EXPORT int cuptiPmSamplingGetCounterDataSize(DataSize *p) {
    CHECK(p, size);
    p->size = sizeof(Image) + p->most * sizeof(((Image *)0)->samples[0]);
    return 0;
}

EXPORT int cuptiPmSamplingStart(OneSession *p) {
    CHECK(p, session);
    int result = told("cuptiPmSamplingStart", p->session->gpu);
    if (result) return result;
    p->session->started = 1;
    p->session->next = now_ns() - LONG_NS; /* the first sample spans a long time */
    p->session->fresh = 1;
    return 0;
}

EXPORT int cuptiPmSamplingStop(OneSession *p) {
    CHECK(p, session);
    if (!p->session->started) return WRONG;
    p->session->started = 0;
    return 0;
}

EXPORT int cuptiPmSamplingDisable(OneSession *p) {
    CHECK(p, session);
    close(p->session->lock);
    free(p->session);
    return 0;
}

EXPORT int cuptiPmSamplingCounterDataImageInitialize(Clear *p) {
    CHECK(p, image);
    p->image->magic = 42;
    p->image->most = (p->size - sizeof(Image)) / sizeof p->image->samples[0];
    p->image->count = 0;
    return 0;
}

/* An interval of cycles lasts as long as the sys clock has it last now. */
static void set_interval(Session *session) {
    const Line *clock = find("sysclk", NULL);
    if (session->cycles)
        session->interval = (uint64_t)((double)session->cycles * 1e9 /
                                       (clock ? atof(clock->word) : 1.4e9));
}

EXPORT int cuptiPmSamplingDecodeData(Decode *p) {
    CHECK(p, overflow);
    Session *session = p->session;
    if (!session->started) return UNKNOWN;
    int result = told("cuptiPmSamplingDecodeData", session->gpu);
    if (result) return result;
    const Line *record = find("record", NULL), *hole = find("hole", NULL);
    uint64_t now = now_ns(), held = session->buffer / (record ? (uint64_t)atoi(record->word) : 4096);
    uint64_t next = session->next + (session->fresh ? LONG_NS : 0);
    p->overflow = 0;
    p->reason = 2;
    set_interval(session);
    if (now > next + held * session->interval) {
        if (!session->latest) return NO_ROOM;
        /* The first that is left spans what was overwritten, too. */
        uint64_t lost = (now - next) / session->interval - held;
        p->image->samples[p->image->count].start = session->next;
        session->next = next + lost * session->interval;
        p->image->samples[p->image->count++].end = session->next;
        session->fresh = 0;
    }
    while (session->next + session->interval <= now) {
        if (p->image->count == p->image->most) {
            p->reason = 1;
            session->next = now; /* what does not fit is lost */
            break;
        }
        uint64_t end = session->next + session->interval;
        if (session->fresh) end = session->next + LONG_NS;
        session->fresh = 0;
        /* A hole: from so many seconds of the wall clock on, so many seconds long. */
        if (hole && end >= (uint64_t)(atof(hole->word) * 1e9) &&
            end < (uint64_t)((atof(hole->word) + hole->number) * 1e9)) {
            session->next = end;
            continue;
        }
        p->image->samples[p->image->count].start = session->next;
        p->image->samples[p->image->count++].end = end;
        session->next = end;
    }
    return 0;
}

EXPORT int cuptiPmSamplingGetCounterDataInfo(Count *p) {
    CHECK(p, completed);
    p->total = p->image->most;
    p->populated = p->completed = p->image->count;
    return 0;
}

EXPORT int cuptiPmSamplingCounterDataGetSampleInfo(Stamp *p) {
    CHECK(p, end);
    if (p->index >= p->image->count) return 1;
    p->start = p->image->samples[p->index].start;
    p->end = p->image->samples[p->index].end;
    uint64_t moved = moved_ns(p->end);
    p->start += moved;
    p->end += moved;
    return 0;
}
