/* A libnvidia-ml.so.1 without a GPU: what a program that loads NVML asks for, it looks up in a table.
 *
 * The table is the file named by NVML_STATE, read anew whenever the GPUs are counted:
 *
 *     count =2                       of the library:  KEY =VALUE, or KEY !CODE for an NVML error
 *     g0 name =NVIDIA L4             of a GPU:        g<index> KEY =VALUE
 *     g0 power !4
 *     g0 process =4242 1000000 0     pid, bytes, whether it is a client of MPS; any number of them
 *     g0 xid =3 79                   an event: its number, which only grows, and its code
 *     g0m1 uuid =MIG-...             of a MIG instance: g<index>m<place> KEY =VALUE
 *
 * A key that is not there is NOT_SUPPORTED. `hang =1`, of the library or of a GPU, holds every call
 * until the file says otherwise. `wide =1` writes process lists with the records of early 535.
 * -DDRIVER=535098 builds the library of driver 535.98: without the functions that came later, and
 * without those that it lacked. tests/agent/gpu/nvml_library.py writes the table. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef DRIVER
#define DRIVER 999000
#endif

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { MOST_DEVICES = 64, MOST_LINES = 4096, LINE_BYTES = 256, XID_EVENT = 8 };

typedef unsigned long long u64;
typedef struct { char device[16], key[24], text[160]; int error; } Entry;
typedef struct { char name[16]; } Device;
typedef struct { u64 told; int count; Device *of[MOST_DEVICES]; } EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Entry table[MOST_LINES];
static int entries;
/* Each device of the table has its place here for ever: a handle outlives a change of the table. */
static Device devices[MOST_DEVICES * 8];
static int known;

static void read_table(void) {
    const char *path = getenv("NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE_BYTES];
    if (!file) return;
    entries = 0;
    while (entries < MOST_LINES && fgets(line, sizeof line, file)) {
        Entry *entry = &table[entries];
        char *value = strpbrk(line, "=!");
        if (!value) continue;
        char kind = *value;
        *value++ = 0;
        value[strcspn(value, "\n")] = 0;
        memset(entry, 0, sizeof *entry);
        if (sscanf(line, "%15s %23s", entry->device, entry->key) == 1) {
            strcpy(entry->key, entry->device);
            entry->device[0] = 0;
        }
        entry->error = kind == '!' ? atoi(value) : OK;
        if (kind == '=') snprintf(entry->text, sizeof entry->text, "%s", value);
        entries++;
    }
    fclose(file);
}

/* The entry number `at` of a device under a key. The lock is held. */
static const Entry *entry_of(const char *device, const char *key, int at) {
    for (int i = 0; i < entries; i++)
        if (!strcmp(table[i].device, device) && !strcmp(table[i].key, key) && at-- == 0) return &table[i];
    return NULL;
}

static int text_of(const char *device, const char *key, int at, char *out, size_t size) {
    pthread_mutex_lock(&lock);
    const Entry *entry = entry_of(device, key, at);
    int error = entry ? entry->error : NOT_SUPPORTED;
    if (!error) snprintf(out, size, "%s", entry->text);
    pthread_mutex_unlock(&lock);
    return error;
}

static int number_of(const char *device, const char *key, u64 *out) {
    char text[160];
    int error = text_of(device, key, 0, text, sizeof text);
    if (!error) *out = strtoull(text, NULL, 10);
    return error;
}

/* Return once neither the library nor this GPU hangs. An instance hangs with its GPU. */
static void wait_while_hung(const char *device) {
    char gpu[16];
    u64 is_hung;
    snprintf(gpu, sizeof gpu, "%.*s", (int)strcspn(device, "m"), device);
    while (!number_of("", "hang", &is_hung) || (*gpu && !number_of(gpu, "hang", &is_hung))) {
        usleep(10000);
        pthread_mutex_lock(&lock);
        read_table();
        pthread_mutex_unlock(&lock);
    }
}

static int ask(Device *device, const char *key, u64 *out) {
    if (!device) return INVALID_ARGUMENT;
    wait_while_hung(device->name);
    return number_of(device->name, key, out);
}

static int ask_text(Device *device, const char *key, char *out, unsigned size) {
    if (!device) return INVALID_ARGUMENT;
    wait_while_hung(device->name);
    return text_of(device->name, key, 0, out, size);
}

static Device *device_named(const char *name) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < known && strcmp(devices[at].name, name)) at++;
    if (at == known) strcpy(devices[known++].name, name);
    pthread_mutex_unlock(&lock);
    return &devices[at];
}

/* ---- the library ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    read_table();
    pthread_mutex_unlock(&lock);
    u64 ready;
    int error = number_of("", "init", &ready);
    return error == NOT_SUPPORTED ? OK : error;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text_of("", "driver", 0, out, size); }

int nvmlSystemGetCudaDriverVersion(int *out) {
    *out = 12040;
    return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlDeviceGetCount_v2(unsigned *out) {
    u64 count = 0;
    pthread_mutex_lock(&lock);
    read_table();
    pthread_mutex_unlock(&lock);
    wait_while_hung("");
    int error = number_of("", "count", &count);
    *out = (unsigned)count;
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    char name[16];
    u64 count = 0, value;
    int error = number_of("", "count", &count);
    if (error) return error;
    if (index >= count || index >= MOST_DEVICES) return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "g%u", index);
    wait_while_hung(name);
    error = number_of(name, "handle", &value);
    *out = device_named(name);
    return error == NOT_SUPPORTED ? OK : error;
}

/* ---- one value of a device ---- */

#define NUMBER(function, type, key)               \
    int function(Device *device, type *out) {     \
        u64 value = 0;                            \
        int error = ask(device, key, &value);     \
        *out = (type)value;                       \
        return error;                             \
    }
#define TEXT(function, key)                                       \
    int function(Device *device, char *out, unsigned size) {      \
        return ask_text(device, key, out, size);                  \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit")
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit")
NUMBER(nvmlDeviceGetFanSpeed, unsigned, "fan")
NUMBER(nvmlDeviceGetPerformanceState, unsigned, "performance_state")
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
NUMBER(nvmlDeviceGetDisplayActive, unsigned, "display")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
NUMBER(nvmlDeviceGetGpuInstanceId, unsigned, "gpu_instance")
NUMBER(nvmlDeviceGetComputeInstanceId, unsigned, "compute_instance")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "throttle")
#if DRIVER >= 535000
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "throttle")
#endif

int nvmlDeviceGetIndex(Device *device, unsigned *out) {
    *out = (unsigned)atoi(device->name + 1);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(Device *device, void *out) {
    struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } *info = out;
    char text[64];
    int error = ask_text(device, "pci", text, sizeof text);
    if (error) return error;
    memset(info, 0, sizeof *info);
    sscanf(text, "%u %u %u", &info->domain, &info->bus, &info->device);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    return OK;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned out[2]) {
    u64 busy = 0;
    int error = ask(device, "utilization", &busy);
    out[0] = (unsigned)busy, out[1] = 0;
    return error;
}

static int memory_of(Device *device, u64 *total, u64 *used, u64 *left) {
    int error = ask(device, "memory", total);
    if (!error) error = ask(device, "memory_used", used);
    if (!error) *left = *total - *used;
    return error;
}

int nvmlDeviceGetMemoryInfo(Device *device, u64 out[3]) { return memory_of(device, &out[0], &out[2], &out[1]); }

#if DRIVER >= 510000
int nvmlDeviceGetMemoryInfo_v2(Device *device, void *out) {
    struct { unsigned version; u64 total, reserved, left, used; } *info = out;
    info->reserved = 0;
    return memory_of(device, &info->total, &info->used, &info->left);
}
#endif

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) {
    u64 value = 0;
    int error = ask(device, "temperature", &value);
    (void)sensor;
    *out = (unsigned)value;
    return error;
}

#if DRIVER >= 565000
int nvmlDeviceGetTemperatureV(Device *device, void *out) {
    struct { unsigned version, sensor; int temperature; } *info = out;
    u64 value = 0;
    int error = ask(device, "temperature", &value);
    info->temperature = (int)value;
    return error;
}
#endif

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, u64 *out) {
    (void)counter;
    return kind == 1 ? ask(device, "ecc", out) : NOT_SUPPORTED; /* 1: uncorrected */
}

/* ---- processes ---- */

typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { Process process; u64 protected_bytes; } WideProcess;

static int processes_of(Device *device, unsigned *count, char *out, int is_mps, int is_newest) {
    char text[160];
    u64 value, is_wide = 0;
    if (!device) return INVALID_ARGUMENT;
    wait_while_hung(device->name);
    int error = number_of(device->name, "processes", &value);
    if (error) return error;
    if (!is_newest || number_of("", "wide", &is_wide)) is_wide = 0;
    unsigned room = *count, found = 0;
    for (int at = 0; !text_of(device->name, "process", at, text, sizeof text); at++) {
        int of_mps = 0;
        Process process = {0, 0, 0xffffffff, 0xffffffff};
        sscanf(text, "%u %llu %d", &process.pid, &process.bytes, &of_mps);
        if (of_mps != is_mps) continue;
        if (out && found < room) {
            WideProcess wide = {process, 0};
            if (is_wide) memcpy(out + found * sizeof wide, &wide, sizeof wide);
            else memcpy(out + found * sizeof process, &process, sizeof process);
        }
        found++;
    }
    *count = found;
    return found == 0 || (out && found <= room) ? OK : INSUFFICIENT_SIZE;
}

#define PROCESSES(function, is_mps, is_newest)                          \
    int function(Device *device, unsigned *count, void *out) {          \
        return processes_of(device, count, out, is_mps, is_newest);     \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 0, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, 1, 0)
#if DRIVER >= 510000 && !(DRIVER >= 535098 && DRIVER < 535104)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 0, 1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 1, 1)
#endif

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, void *out) {
    (void)device, (void)out;
    *count = 0;
    return OK;
}

/* ---- MIG ---- */

#if DRIVER >= 450000
int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    u64 mode = 0;
    int error = ask(device, "mig", &mode);
    *current = *pending = (unsigned)mode;
    return error;
}

NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, "mig_most")

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    char name[16], text[160];
    u64 most = 0;
    int error = ask(device, "mig_most", &most);
    if (error) return error;
    if (index >= most) return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%.6sm%u", device->name, index % 100);
    if (text_of(name, "uuid", 0, text, sizeof text) == NOT_SUPPORTED) return NOT_FOUND;
    *out = device_named(name);
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(Device *device, unsigned *out) {
    *out = strchr(device->name, 'm') != NULL;
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *device, Device **out) {
    char name[16];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(device->name, "m"), device->name);
    *out = device_named(name);
    return OK;
}
#endif

/* ---- events ---- */

int nvmlEventSetCreate(EventSet **out) {
    *out = calloc(1, sizeof **out);
    return OK;
}

int nvmlEventSetFree(EventSet *set) {
    free(set);
    return OK;
}

/* The first event of a device that comes after `told`; 0: none. */
static u64 next_event(const char *device, u64 told, u64 *code) {
    char text[160];
    u64 number, found = 0, its_code;
    for (int at = 0; !text_of(device, "xid", at, text, sizeof text); at++)
        if (sscanf(text, "%llu %llu", &number, &its_code) == 2 && number > told && (!found || number < found))
            found = number, *code = its_code;
    return found;
}

int nvmlDeviceRegisterEvents(Device *device, u64 kinds, EventSet *set) {
    u64 value, code, number;
    int error = number_of(device->name, "events", &value);
    if (error && error != NOT_SUPPORTED) return error;
    if (!(kinds & XID_EVENT) || set->count == MOST_DEVICES) return INVALID_ARGUMENT;
    set->of[set->count++] = device;
    /* Nobody is told of what was before. */
    while ((number = next_event(device->name, set->told, &code))) set->told = number;
    return OK;
}

int nvmlEventSetWait_v2(EventSet *set, void *out, unsigned timeout_ms) {
    struct { Device *device; u64 kind, data; unsigned gpu_instance, compute_instance; } *event = out;
    u64 code = 0, number, first = 0;
    memset(event, 0, sizeof *event);
    for (int at = 0; at < set->count; at++)
        if ((number = next_event(set->of[at]->name, set->told, &code)) && (!first || number < first)) {
            first = number;
            event->device = set->of[at], event->kind = XID_EVENT, event->data = code;
        }
    if (first) {
        set->told = first;
        return OK;
    }
    usleep(timeout_ms * 1000);
    return TIMEOUT;
}

/* ---- what only other programs ask for ---- */

#define NONE(function)                        \
    int function(Device *device, void *out) { \
        (void)device, (void)out;              \
        return NOT_SUPPORTED;                 \
    }

NONE(nvmlDeviceGetDriverModel_v2)
NONE(nvmlDeviceGetConfComputeMemSizeInfo)
NONE(nvmlDeviceGetBAR1MemoryInfo)

int nvmlDeviceGetEncoderUtilization(Device *device, unsigned *out, unsigned *period_us) {
    (void)device, (void)out, (void)period_us;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetDecoderUtilization(Device *device, unsigned *out, unsigned *period_us) {
    return nvmlDeviceGetEncoderUtilization(device, out, period_us);
}
int nvmlDeviceGetProcessUtilization(Device *device, void *out, unsigned *count, u64 since) {
    (void)device, (void)out, (void)since;
    *count = 0;
    return NOT_FOUND;
}
