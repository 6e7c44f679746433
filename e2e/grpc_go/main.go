// Command grpc_go is a client of grpc-go that its standard input controls, with one command of JSON on each line. It
// writes what happens as lines of JSON: the messages and the end of each stream, and the states of the connection.
// Messages are bytes, which the test encodes: this program needs no protobuf of a service.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"io"
	"log"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// A command names a stream and what to do with it. Do is open, send, end, or cancel.
type command struct {
	Do        string `json:"do"`
	Stream    int    `json:"stream"`
	Method    string `json:"method"`
	Message   []byte `json:"message"`
	TimeoutMS int    `json:"timeout_ms"`
	Gzip      bool   `json:"gzip"`
}

// An event has the number of a stream with a message or with its final code, or the connection's new state.
type event struct {
	Stream  int    `json:"stream"`
	Message []byte `json:"message,omitempty"`
	Code    string `json:"code,omitempty"`
	Text    string `json:"text,omitempty"`
	State   string `json:"state,omitempty"`
}

// A stream is an open call. Its commands wait in a queue, because a send waits for the windows of flow control.
type stream struct {
	commands chan command
	cancel   context.CancelFunc
}

// plain is a codec that leaves messages as they are.
type plain struct{}

func (plain) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (plain) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte{}, data...)
	return nil
}
func (plain) Name() string { return "proto" }

var (
	writing sync.Mutex
	output  = json.NewEncoder(os.Stdout)
)

func report(happened event) {
	writing.Lock()
	defer writing.Unlock()
	if err := output.Encode(happened); err != nil {
		log.Fatal(err)
	}
}

func main() {
	target := flag.String("target", "", "the server's `address`")
	ping := flag.Duration("ping", 0, "the time without a byte after which the client sends a PING; grpc-go allows 10s or more")
	pong := flag.Duration("pong", time.Second, "the time in which the server must answer the PING")
	authority := flag.String("ca", "", "the `file` of the authority that signed the server's certificate; without it, the client uses plain text")
	pair := flag.String("pair", "", "the `folder` with tls.crt and tls.key of the client")
	flag.Parse()
	transport, err := security(*authority, *pair)
	if err != nil {
		log.Fatal(err)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(plain{}), grpc.MaxCallRecvMsgSize(64<<20)),
	}
	if *ping > 0 {
		parameters := keepalive.ClientParameters{Time: *ping, Timeout: *pong, PermitWithoutStream: true}
		options = append(options, grpc.WithKeepaliveParams(parameters))
	}
	connection, err := grpc.NewClient(*target, options...)
	if err != nil {
		log.Fatal(err)
	}
	go watch(connection)
	streams := map[int]stream{}
	input := json.NewDecoder(os.Stdin)
	for {
		var next command
		if err := input.Decode(&next); err == io.EOF {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		switch next.Do {
		case "open":
			streams[next.Stream] = open(connection, next)
		case "cancel":
			streams[next.Stream].cancel()
		default:
			streams[next.Stream].commands <- next
		}
	}
}

// security returns plain text without an authority, and TLS with it. With a pair, the client has a certificate.
func security(authority, pair string) (credentials.TransportCredentials, error) {
	if authority == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if pair != "" {
		own, err := tls.LoadX509KeyPair(filepath.Join(pair, "tls.crt"), filepath.Join(pair, "tls.key"))
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return credentials.NewTLS(config), nil
}

// watch reports the states of the connection.
func watch(connection *grpc.ClientConn) {
	for state := connectivity.Idle; ; state = connection.GetState() {
		report(event{State: state.String()})
		connection.WaitForStateChange(context.Background(), state)
	}
}

// open begins a stream, which follows its commands and reports its messages.
func open(connection *grpc.ClientConn, asked command) stream {
	ctx, cancel := context.Background(), context.CancelFunc(nil)
	if asked.TimeoutMS > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(asked.TimeoutMS)*time.Millisecond)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	var options []grpc.CallOption
	if asked.Gzip {
		options = append(options, grpc.UseCompressor(gzip.Name))
	}
	begun := stream{make(chan command, 1000), cancel}
	kind := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	call, err := connection.NewStream(ctx, kind, asked.Method, options...)
	if err != nil {
		end(asked.Stream, err)
		return begun
	}
	go send(ctx, call, begun.commands)
	go receive(asked.Stream, call)
	return begun
}

// send follows the commands of a stream. An error of SendMsg also ends the receiver, which reports it.
func send(ctx context.Context, call grpc.ClientStream, commands <-chan command) {
	for {
		select {
		case <-ctx.Done():
			return
		case next := <-commands:
			if next.Do == "end" {
				_ = call.CloseSend()
			} else {
				_ = call.SendMsg(&next.Message)
			}
		}
	}
}

// receive reports the messages of a stream and its end.
func receive(number int, call grpc.ClientStream) {
	for {
		var message []byte
		if err := call.RecvMsg(&message); err != nil {
			end(number, err)
			return
		}
		report(event{Stream: number, Message: message})
	}
}

func end(number int, err error) {
	if err == io.EOF {
		err = nil
	}
	final := status.Convert(err)
	report(event{Stream: number, Code: final.Code().String(), Text: final.Message()})
}
